"""GPT in its GPT-2, Llama and Qwen shapes."""
