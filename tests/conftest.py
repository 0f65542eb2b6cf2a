"""Tests run on the CPU, also where there is a GPU."""

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before anything loads torch
