"""Show a run as a page: figures, their server, and the same page as a single file."""
