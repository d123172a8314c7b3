"""Graph to programs: segment, place, localize, order, communicate, roll; none calls another."""
