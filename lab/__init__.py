"""The bench that a run is put on: nothing here has to be read to follow the course."""
