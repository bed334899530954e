"""Run the main job on real input, in one command."""
