"""What can be said about forms: cost, memory, time, and whether they keep their promises."""
