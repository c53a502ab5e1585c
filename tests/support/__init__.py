"""What tests of all folders share: waits, real parts and simulations."""
