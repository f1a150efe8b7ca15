"""GPT in the shapes of GPT-2, Llama, Qwen and the families beside them."""
