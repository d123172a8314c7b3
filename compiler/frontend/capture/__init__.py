"""From the user's model to a graph; the only part of the front end that loads torch."""
