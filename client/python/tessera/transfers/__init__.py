"""Arrays on their way to the server and back."""
