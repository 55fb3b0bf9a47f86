"""How much memory and time a run takes, compiling included, and how well it learns."""
