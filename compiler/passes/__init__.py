"""From graph to programs: segment, place, localize, order, communicate, roll; no pass calls another."""
