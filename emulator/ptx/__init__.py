"""PTX translated to C++ that the SIMT emulator runs; see emulator/ptx_to_cpp.py."""
