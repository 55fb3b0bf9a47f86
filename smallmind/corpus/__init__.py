"""A person's texts: found in files and folders, read document by document."""
