"""The HTTP face of serving, in OpenAI's shapes."""
