"""jsonl into token files, in several processes, resumable at any point."""
