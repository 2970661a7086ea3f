// A thread computes all steps of one element of the state. AT_FACTOR, AT_TERM and AT_RESULT are offsets of step `at`.

FRAGMENT(scan) {
  NUMBER state = NUMBER(0);
  u32 first = 0;
  // The operands of several steps are loaded together, because a step waits for the one before it, but loads do not.
  for (; first + TOGETHERu <= STEPSu; first += TOGETHERu) {
    NUMBER factor[TOGETHER], term[TOGETHER];
    #pragma unroll
    for (u32 k = 0; k < TOGETHERu; ++k) {
      const u32 at = first + k;
      factor[k] = wide(FACTORS[AT_FACTOR]);
      term[k] = wide(TERMS[AT_TERM]);
    }
    #pragma unroll
    for (u32 k = 0; k < TOGETHERu; ++k) {
      const u32 at = first + k;
      state = factor[k] * state + term[k];
      RESULT[AT_RESULT] = narrow<TYPE>(state);
    }
  }
  for (u32 at = first; at < STEPSu; ++at) {
    state = wide(FACTORS[AT_FACTOR]) * state + wide(TERMS[AT_TERM]);
    RESULT[AT_RESULT] = narrow<TYPE>(state);
  }
}
