"""Parameter groups, main parameters, loss scaling, clipping and learning-rate schedules."""
