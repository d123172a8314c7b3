"""What needs torch after the compile: launching the scripts, the reference run, comparing them."""
