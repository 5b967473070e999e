"""Router, workers and the lockstep that lets ranks with different requests share their experts."""
