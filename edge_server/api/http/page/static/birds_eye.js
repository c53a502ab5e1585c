// The road from above: x forward and y to the left of the front axle's middle, both in metres.

const AHEAD_M = 55;
const SIDE_M = 8;
const STEP_M = 1;
const FRONT_M = 0.9; // of the vehicle, before its front axle
const SIGMAS = 2; // 95 %
const UPPER = [[0, 0], [0, 1], [0, 2], [0, 3], [1, 1], [1, 2], [1, 3], [2, 2], [2, 3], [3, 3]];

// y of a boundary at x, and its standard deviation there.
function boundary(polynomial) {
  const { c0 = 0, c1 = 0, c2 = 0, c3 = 0, covariance = [] } = polynomial;
  return (x) => {
    const powers = [1, x, x * x, x * x * x];
    let variance = 0;
    covariance.forEach((value, place) => {
      const [row, column] = UPPER[place];
      variance += (row === column ? 1 : 2) * value * powers[row] * powers[column];
    });
    return [c0 + x * (c1 + x * (c2 + x * c3)), Math.sqrt(Math.max(0, variance))];
  };
}

function sampled(polynomial) {
  const at = boundary(polynomial);
  const last = Math.min(polynomial.x_max_m ?? 0, AHEAD_M);
  const points = [];
  for (let x = Math.max(polynomial.x_min_m ?? 0, 0); x < last; x += STEP_M) points.push([x, ...at(x)]);
  if (last > 0) points.push([last, ...at(last)]);
  return points;
}

// `colours` has road, edge, text, quiet, lane, other, paint as #rrggbb; `size` is in CSS px.
export function drawRoad(context, size, frame, vehicleWidth, colours) {
  const { width, height } = size;
  const across = width / (2 * SIDE_M);
  // Lengths are drawn shorter than widths, but not that of the vehicle: it would be hard to see.
  const car = { width: vehicleWidth * across, length: 2.1 * vehicleWidth * across };
  const along = (height - 0.86 * car.length) / AHEAD_M;
  const px = (x, y) => [width / 2 - y * across, height - 0.86 * car.length - x * along];
  const line = (points) => {
    context.beginPath();
    points.forEach(([x, y], place) => (place ? context.lineTo(...px(x, y)) : context.moveTo(...px(x, y))));
  };

  context.fillStyle = colours.road;
  context.fillRect(0, 0, width, height);
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "bottom";
  for (let x = 0; x <= AHEAD_M; x += 10) {
    line([[x, SIDE_M], [x, -SIDE_M]]);
    context.strokeStyle = colours.edge;
    context.lineWidth = 1;
    context.stroke();
    context.fillStyle = colours.quiet;
    context.fillText(x ? `${x} m` : "front axle", 8, px(x, 0)[1] - 3);
  }

  const lanes = (frame?.lanes ?? []).filter((lane) => lane.ground?.polynomial);
  const shapes = lanes.map((lane) => ({ lane, points: sampled(lane.ground.polynomial) }));
  const left = shapes.find(({ lane }) => lane.index === -1);
  const right = shapes.find(({ lane }) => lane.index === 1);
  if (left && right) {
    line([...left.points, ...[...right.points].reverse()]);
    const shade = context.createLinearGradient(0, height, 0, 0);
    shade.addColorStop(0, `${colours.lane}33`);
    shade.addColorStop(1, `${colours.lane}00`);
    context.fillStyle = shade;
    context.fill();
  }
  for (const { lane, points } of shapes) {
    const ego = Math.abs(lane.index) === 1;
    const colour = lane.color === "MARKING_COLOR_YELLOW" ? colours.paint : ego ? colours.lane : colours.other;
    line([
      ...points.map(([x, y, std]) => [x, y + SIGMAS * std]),
      ...points.map(([x, y, std]) => [x, y - SIGMAS * std]).reverse(),
    ]);
    const band = context.createLinearGradient(0, height, 0, 0);
    band.addColorStop(0, colour);
    band.addColorStop(1, `${colour}00`);
    context.globalAlpha = 0.5;
    context.fillStyle = band;
    context.fill();
    context.globalAlpha = lane.predicted ? 0.55 : 1;
    line(points);
    context.strokeStyle = colour;
    context.lineWidth = ego ? 3 : 2;
    context.setLineDash(lane.type === "MARKING_TYPE_DASHED" ? [14, 12] : lane.predicted ? [3, 7] : []);
    context.stroke();
    context.setLineDash([]);
    context.globalAlpha = 1;
  }

  const [middle, top] = px(FRONT_M, 0);
  const box = (inset, from, to, radius) => {
    context.beginPath();
    context.roundRect(middle - car.width / 2 + inset, top + from * car.length, car.width - 2 * inset, (to - from) * car.length, radius);
    context.fill();
  };
  context.fillStyle = colours.text;
  box(0, 0, 1, 0.28 * car.width);
  context.fillStyle = colours.road;
  context.globalAlpha = 0.8;
  box(0.14 * car.width, 0.26, 0.42, 0.1 * car.width);
  box(0.18 * car.width, 0.74, 0.84, 0.08 * car.width);
  context.globalAlpha = 1;
  return lanes.length;
}
