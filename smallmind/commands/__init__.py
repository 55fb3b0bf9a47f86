"""The bodies of commands: what they work out, and what they show of it."""
