"""OpenAI's dialect: chat completions, completions, models, embeddings and responses under /v1."""
