"""The console: the line that changes, work under way, tables."""
