"""What a team would build first: FastAPI, arq, the stock PostgreSQL checkpointer, and a Redis stream per run."""
