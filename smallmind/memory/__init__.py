"""The pool that arrays are rented from, and how much memory is used and free."""
