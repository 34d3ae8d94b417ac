"""`seamark bench`: what users run to see what Seamark gains and costs, on real engines."""
