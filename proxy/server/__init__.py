"""uvicorn, the FastAPI application, and the operator's pages."""
