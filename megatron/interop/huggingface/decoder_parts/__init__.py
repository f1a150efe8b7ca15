"""What several architectures of Hugging Face models share: rotary positions, experts, kinds of layers."""
