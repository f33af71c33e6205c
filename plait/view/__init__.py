"""A run as a page: figures, the server that shows them, and the same page as one file."""
