"""A machine looked over before a run: what is as it should be, what is not, and what to do about it."""
