"""Parameter groups, main parameters, loss scaling, gradient clipping and learning-rate schedules."""
