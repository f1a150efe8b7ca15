"""Raw text into clean jsonl: encodings, languages, duplicates."""
