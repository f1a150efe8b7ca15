"""OpenAI's API over HTTP, with a page to look at a model."""
