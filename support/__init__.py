"""What the files at the top level need. One subject a file: see docs/extending.md."""
