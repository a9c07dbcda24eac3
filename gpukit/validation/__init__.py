"""How true the simulator is: its counts beside those of Nsight Compute, kernel by kernel."""
