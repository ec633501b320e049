"""The OpenAI API, the admin port, and the life of the process."""
