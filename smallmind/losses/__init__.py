"""What training minimises: each loss is a file, and a line in `parts.LOSSES`."""
