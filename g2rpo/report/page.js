"use strict";
addEventListener("beforeprint", () => {
  for (const part of document.querySelectorAll("details")) part.open = true;
});
(() => {
  const data = document.getElementById("slider-data");
  if (!data) return;
  const { steps, frames } = JSON.parse(data.textContent);
  const slider = document.getElementById("iteration");
  const output = document.getElementById("iteration-value");
  const play = document.getElementById("play");
  const cells = [...document.querySelectorAll("img[data-cell]")];
  const show = () => {
    const i = Number(slider.value);
    output.textContent = steps[i];
    document.body.dataset.iteration = steps[i];
    slider.setAttribute("aria-valuetext", `iteration ${steps[i]}`);
    for (const cell of cells) cell.src = frames[Number(cell.dataset.cell)][i];
  };
  let timer = null;
  const stop = () => {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
  };
  slider.addEventListener("input", () => { if (timer) stop(); show(); });
  play.addEventListener("click", () => {
    if (timer) return stop();
    if (Number(slider.value) >= steps.length - 1) slider.value = "0";
    show();
    play.textContent = "Stop";
    timer = setInterval(() => {
      if (Number(slider.value) >= steps.length - 1) return stop();
      slider.value = String(Number(slider.value) + 1);
      show();
    }, 700);
  });
})();
