"""Charts and pages of runs, made from the metrics files that they write."""
