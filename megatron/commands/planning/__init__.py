"""Commands that say what a run will do, need and cost before it runs."""
