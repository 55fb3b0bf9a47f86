"""Where arrays come from and how much memory they take."""
