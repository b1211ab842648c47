//! Slow disks and disks that hang: a library between a server and the system makes every sync as slow as a file says.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use crate::{Dir, Node};

/// Waits before every sync for as many milliseconds as the file `FILE_NAME` says, if there is one, and as long as it
/// says so.
const BRAKE: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <unistd.h>
static int asked(void) {
    int wait = 0;
    FILE *file = fopen(FILE_NAME, "r");
    if (file) {
        if (fscanf(file, "%d", &wait) != 1) wait = 0;
        fclose(file);
    }
    return wait;
}
int fdatasync(int fd) {
    static int (*sync)(int);
    int waited, wait;
    for (waited = 0; waited < (wait = asked()); waited += 10)
        usleep(1000 * (wait - waited < 10 ? wait - waited : 10));
    if (!sync) sync = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    return sync(fd);
}
"#;

/// The brake of one node.
#[derive(Debug)]
pub struct Brake(PathBuf);

impl Brake {
    /// Gives a node that is not started a brake, whose files are in this directory.
    pub fn fit(node: &mut Node, dir: &Dir) -> Self {
        let source = dir.write("brake.c", BRAKE);
        let library = dir.name(&format!("brake-{}.so", node.name));
        let file = dir.path(&format!("brake-{}", node.name));
        let compiled = Command::new("cc")
            .args(["-shared", "-fPIC", "-o", &library])
            .arg(format!("-DFILE_NAME=\"{}\"", file.display()))
            .args([&source, "-ldl"])
            .status()
            .expect("a C compiler, as for the build");
        assert!(compiled.success());
        node.variable = Some(("LD_PRELOAD", Box::leak(library.into_boxed_str())));
        Self(file)
    }

    /// Every sync takes this much longer from now on.
    pub fn set(&self, by: Duration) {
        // Nobody finds a file that is not written yet.
        let aside = self.0.with_extension("new");
        fs::write(&aside, by.as_millis().to_string()).unwrap();
        fs::rename(&aside, &self.0).unwrap();
    }

    /// Syncs take no longer than they do, also those that wait.
    pub fn release(&self) {
        let _ = fs::remove_file(&self.0);
    }
}
