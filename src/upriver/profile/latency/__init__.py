"""Predict the seconds of operators from models fitted on this machine."""
