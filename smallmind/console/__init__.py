"""What people see: the line that changes, what is under way, tables."""
