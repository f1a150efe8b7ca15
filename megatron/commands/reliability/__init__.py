"""Commands that examine machines, layouts and runs, and do them harm on purpose."""
