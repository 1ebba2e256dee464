"""Back ends for tests: one runs late as a GPU does, one emulates a GPU, one runs at a given speed."""
