"""A page and OpenAI's API for models on this machine. Starlette and uvicorn are the extra serve."""
