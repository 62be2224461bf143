// A fault in one section leaves the others standing, and shows.
function attempt(id, draw) {
  try {
    return draw();
  } catch (error) {
    console.error(error);
    document.getElementById(id).append(h('p', {class: 'note'}, `This section could not be drawn: ${error.message}`));
    return () => {};
  }
}
attempt('overview', drawOverview);
attempt('rewards', drawRewards);
const openTrajectory = attempt('trajectories', drawBrowser);
const openTimeline = attempt('timeline', () => drawTimeline(openTrajectory));
attempt('schedules', drawSchedules);
attempt('steps', () => drawSteps(openTimeline));
attempt('setup', drawSetup);
