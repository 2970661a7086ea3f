// A block reads a tile of SIDE x SIDE elements row by row, and writes it column by column.
FRAGMENT(transpose) {
  const u32 column = threadIdx.x % 32u, row = threadIdx.x / 32u;
  DECLARE_TILES
  for (u32 line = row; line < SIDEu; line += ROWSu) {
    const INDEX READ_DIM = across * SIDEu + column, WRITTEN_DIM = down * SIDEu + line;
    if (READ_DIM >= READ_SIZEu || WRITTEN_DIM >= WRITTEN_SIZEu) continue;
    FILL_TILES
  }
  __syncthreads();
  for (u32 line = row; line < SIDEu; line += ROWSu) {
    const INDEX READ_DIM = across * SIDEu + line, WRITTEN_DIM = down * SIDEu + column;
    if (READ_DIM >= READ_SIZEu || WRITTEN_DIM >= WRITTEN_SIZEu) continue;
    STORE_TILES
  }
}
