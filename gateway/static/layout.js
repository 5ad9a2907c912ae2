// Where everything of the picture goes. Pure: boxes and links in, numbers out; units are CSS pixels.
//
// Wide, pools are columns in the order of a request's walk; narrow, they are bands below each other.

const NARROW = 620;
const PAD = 4;
const TITLE = 20;
const SPACE = 8; // Between boxes of a pool.
const BAND_SPACE = 46; // Below pools that links leave, for the links' words.
const COLUMN_SHARE = 0.74; // Of a column's width is its boxes'.
const SLIM = 40;
const HEIGHTS = [[5, 58], [9, SLIM], [Infinity, 24]]; // Of a box, by how many the largest column has.

// `pools`: [{name, title, column, hasKV, nodes}], those of one column below each other.
// `links`: [{source, target}].
// Answers {width, height, titles: [{name, title, x, y}], boxes: Map id → {x, y, width, height},
// curves: [{link, path, x, y}]}, where x and y are the words' middle.
export function layOut(pools, links, width) {
  const placed = width < NARROW ? inBands(pools, width) : inColumns(pools, width);
  return { width, ...placed, curves: curvesOf(links, placed.boxes, width < NARROW) };
}

function inColumns(pools, width) {
  const numbers = [...new Set(pools.map((pool) => pool.column))].sort((one, other) => one - other);
  const columns = numbers.map((number) => pools.filter((pool) => pool.column === number));
  const boxWidth = clamp(((width - 2 * PAD) / columns.length) * COLUMN_SHARE, 118, 200);
  const step = columns.length > 1 ? (width - 2 * PAD - boxWidth) / (columns.length - 1) : 0;
  const lengths = columns.map((column) => column.reduce((sum, pool) => sum + pool.nodes.length, 0));
  const longest = Math.max(...lengths, 1);
  const boxHeight = heightFor(longest);
  const heights = columns.map((column) => column.reduce((sum, pool) => sum + heightOf(pool, boxHeight), 0));
  const height = Math.max(...heights, 0) + 2 * PAD;
  const boxes = new Map();
  const titles = [];
  columns.forEach((column, index) => {
    const x = PAD + index * step;
    let y = PAD + (height - 2 * PAD - heights[index]) / 2;
    for (const pool of column) {
      titles.push({ name: pool.name, title: pool.title, x, y: y + 13 });
      y += TITLE;
      for (const node of pool.nodes) {
        boxes.set(node.id, { x, y, width: boxWidth, height: heightIn(pool, boxHeight) });
        y += heightIn(pool, boxHeight) + SPACE;
      }
      y += SPACE;
    }
  });
  return { height, titles, boxes };
}

const heightOf = (pool, boxHeight) => TITLE + pool.nodes.length * (heightIn(pool, boxHeight) + SPACE) + SPACE;

// Who has no KV needs no line for it.
const heightIn = (pool, boxHeight) => (pool.hasKV ? boxHeight : Math.min(boxHeight, SLIM));

function inBands(pools, width) {
  const boxWidth = (width - 2 * PAD - SPACE) / 2;
  const boxes = new Map();
  const titles = [];
  let y = PAD;
  let below = 0;
  for (const pool of pools) {
    titles.push({ name: pool.name, title: pool.title, x: PAD, y: y + 13 });
    y += TITLE;
    const rows = Math.ceil(pool.nodes.length / 2);
    const boxHeight = heightIn(pool, heightFor(rows));
    pool.nodes.forEach((node, index) => {
      const x = PAD + (index % 2) * (boxWidth + SPACE);
      const row = Math.floor(index / 2);
      boxes.set(node.id, { x, y: y + row * (boxHeight + SPACE), width: boxWidth, height: boxHeight });
    });
    below = pool.hasKV ? BAND_SPACE : SPACE;
    y += rows * (boxHeight + SPACE) + below;
  }
  return { height: Math.max(y - below, 0) + PAD, titles, boxes };
}

const heightFor = (boxes) => HEIGHTS.find(([most]) => boxes <= most)[1];

function curvesOf(links, boxes, isNarrow) {
  const curves = [];
  for (const link of links) {
    const from = boxes.get(link.source);
    const to = boxes.get(link.target);
    if (!from || !to || from === to) continue;
    curves.push({ link, ...(isNarrow ? downward(from, to) : sideways(from, to)) });
  }
  return curves;
}

function sideways(from, to) {
  const startY = from.y + from.height / 2;
  const endY = to.y + to.height / 2;
  if (from.x === to.x) {
    // Of one pool: a bow beside it.
    const x = from.x + from.width;
    const path = `M${x} ${startY}C${x + 44} ${startY} ${x + 44} ${endY} ${x} ${endY}`;
    return { path, x: x + 34, y: (startY + endY) / 2 };
  }
  const isRight = to.x > from.x;
  const startX = isRight ? from.x + from.width : from.x;
  const endX = isRight ? to.x : to.x + to.width;
  const bend = (endX - startX) / 2;
  const path = `M${startX} ${startY}C${startX + bend} ${startY} ${endX - bend} ${endY} ${endX} ${endY}`;
  return { path, x: (startX + endX) / 2, y: (startY + endY) / 2 };
}

function downward(from, to) {
  const startX = from.x + from.width / 2;
  const endX = to.x + to.width / 2;
  if (from.y === to.y) {
    const y = from.y + from.height;
    const path = `M${startX} ${y}C${startX} ${y + 24} ${endX} ${y + 24} ${endX} ${y}`;
    return { path, x: (startX + endX) / 2, y: y + 20 };
  }
  const isDown = to.y > from.y;
  const startY = isDown ? from.y + from.height : from.y;
  const endY = isDown ? to.y : to.y + to.height;
  const bend = (endY - startY) / 2;
  const path = `M${startX} ${startY}C${startX} ${startY + bend} ${endX} ${endY - bend} ${endX} ${endY}`;
  // Near its end, where no other pool lies between: above the pool's title, or below its boxes.
  return { path, x: endX, y: endY + (isDown ? -TITLE - 14 : 14) };
}

const clamp = (value, least, most) => Math.min(Math.max(value, least), most);
