// Scans: scan.py explains them and fills in the names in capitals. A block runs all steps for its rows.

FRAGMENT(kernel) {
  RESIDENT(memory);
  BEFORE
  __syncthreads();
  #pragma unroll 1
  for (u32 step = 0; step < STEPSu; ++step) {
    IN_STEP
    STEP
  }
  AFTER
}
