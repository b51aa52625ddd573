"""The HTTP server with OpenAI's API."""
