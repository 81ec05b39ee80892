"""What a run optimises: each method is a file or a folder."""
