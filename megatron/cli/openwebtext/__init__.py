"""The scripts of Megatron-LM's ``tools/openwebtext`` that prepare web text, with their arguments."""
