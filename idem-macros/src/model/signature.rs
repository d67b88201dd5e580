//! The function's signature, checked.

use proc_macro2::{TokenStream, TokenTree};
use quote::ToTokens;
use syn::{FnArg, GenericArgument, Pat, PatType, PathArguments, Safety, Signature, Type};

use super::{HandlerFn, Parameter, Role};
use crate::diagnostics::Diagnostics;
use crate::parse::Function;
use crate::paths::generated;

impl HandlerFn {
    /// Checks the signature. Nothing if it is not one of a handler.
    pub(crate) fn check(function: Function, diagnostics: &mut Diagnostics) -> Option<Self> {
        let errors_before = diagnostics.count();
        check_signature(&function.sig, diagnostics);
        let parameters = parameters(&function.sig);
        let event = event(&function.sig, &parameters, diagnostics);
        check_one_transaction(&parameters, diagnostics);
        check_jobs_fit(&parameters, diagnostics);
        let (event, batch) = event?;
        (diagnostics.count() == errors_before).then_some(Self { function, event, batch, parameters })
    }
}

fn check_signature(sig: &Signature, diagnostics: &mut Diagnostics) {
    if sig.asyncness.is_none() {
        diagnostics.error_on(sig.fn_token, "an `#[idempotent]` handler must be an `async fn`");
    }
    let mut refuse = |word: &dyn ToTokens, name: &str| {
        diagnostics.error_on(word.to_token_stream(), format!("an `#[idempotent]` handler cannot be {name}"));
    };
    if let Some(word) = &sig.constness {
        refuse(word, "`const`");
    }
    match &sig.safety {
        Safety::Unsafe(word) => refuse(word, "`unsafe`"),
        Safety::Safe(word) => refuse(word, "`safe`"),
        Safety::Default => {}
    }
    if let Some(abi) = &sig.abi {
        refuse(abi, "`extern`");
    }
    if let Some(dots) = &sig.variadic {
        refuse(dots, "variadic");
    }
    check_not_generic(sig, diagnostics);
    for input in &sig.inputs {
        check_input(input, diagnostics);
    }
}

fn check_not_generic(sig: &Signature, diagnostics: &mut Diagnostics) {
    let message = "an `#[idempotent]` handler cannot be generic: it is one value, for one type of event";
    if !sig.generics.params.is_empty() {
        diagnostics.error_on(&sig.generics.params, message);
    } else if let Some(clause) = &sig.generics.where_clause {
        diagnostics.error_on(clause, message);
    }
}

fn check_input(input: &FnArg, diagnostics: &mut Diagnostics) {
    match input {
        FnArg::Receiver(receiver) => {
            let message =
                "an `#[idempotent]` handler is a free function: take shared values as `State<T>`, not as `self`";
            diagnostics.error_on(receiver, message);
        }
        FnArg::Typed(input) if has_impl(input.ty.to_token_stream()) => {
            diagnostics.error_on(&input.ty, "an `#[idempotent]` handler cannot take `impl Trait`: name the type");
        }
        FnArg::Typed(_) => {}
    }
}

/// Whether `impl` stands anywhere in a type.
fn has_impl(ty: TokenStream) -> bool {
    ty.into_iter().any(|token| match token {
        TokenTree::Ident(word) => word == "impl",
        TokenTree::Group(group) => has_impl(group.stream()),
        TokenTree::Punct(_) | TokenTree::Literal(_) => false,
    })
}

/// Tells by its form what each parameter is for.
fn parameters(sig: &Signature) -> Vec<Parameter> {
    let mut event_seen = false;
    let typed = sig.inputs.iter().filter_map(|input| match input {
        FnArg::Typed(typed) => Some(typed),
        FnArg::Receiver(_) => None,
    });
    typed.enumerate().map(|(position, typed)| parameter(sig, position, typed, &mut event_seen)).collect()
}

fn parameter(sig: &Signature, position: usize, typed: &PatType, event_seen: &mut bool) -> Parameter {
    let role = match bare(&typed.ty) {
        Type::Reference(reference) if reference.mutability.is_some() => Role::Transaction(reference.elem.clone()),
        Type::Reference(reference) => match bare(&reference.elem) {
            Type::Slice(slice) => Role::Jobs(slice.elem.clone()),
            _ => Role::Job(reference.elem.clone()),
        },
        owned if *event_seen || is_state(owned) => Role::Shared,
        owned => {
            *event_seen = true;
            if element_of_vec(owned).is_some() { Role::Events } else { Role::Event }
        }
    };
    let name = match &*typed.pat {
        // A parameter of the handler's own name would be taken for the handler, which is a unit struct.
        Pat::Ident(pat) if pat.subpat.is_none() && pat.ident != sig.ident => pat.ident.clone(),
        _ => generated(&position.to_string()),
    };
    Parameter { name, ty: (*typed.ty).clone(), role }
}

/// A type without the invisible groups that `macro_rules` puts around it, and without parentheses.
fn bare(ty: &Type) -> &Type {
    match ty {
        Type::Group(group) => bare(&group.elem),
        Type::Paren(paren) => bare(&paren.elem),
        _ => ty,
    }
}

/// Whether it is a `State<T>`, by whatever path. It may stand before the event, where every other owned type is the event.
fn is_state(ty: &Type) -> bool {
    only_argument(ty, "State").is_some()
}

/// The `T` of `Vec<T>`, by whatever path. A trait cannot tell it from an event that is a list, so its name does.
fn element_of_vec(ty: &Type) -> Option<&Type> {
    only_argument(ty, "Vec")
}

/// The `T` of `Name<T>`.
fn only_argument<'a>(ty: &'a Type, name: &str) -> Option<&'a Type> {
    let Type::Path(path) = ty else { return None };
    let last = path.path.segments.last()?;
    let PathArguments::AngleBracketed(arguments) = &last.arguments else { return None };
    match arguments.args.first()? {
        GenericArgument::Type(argument) if last.ident == name && arguments.args.len() == 1 => Some(argument),
        _ => None,
    }
}

/// The type of the event, and whether many are taken at once.
fn event(sig: &Signature, parameters: &[Parameter], diagnostics: &mut Diagnostics) -> Option<(Type, bool)> {
    let taken = parameters.iter().find(|parameter| matches!(parameter.role, Role::Event | Role::Events));
    let Some(taken) = taken else {
        let message = "an `#[idempotent]` handler takes its event by value, such as `event: OrderPaid`; a `&mut` \
                       parameter is the transaction, and a `&` parameter the job";
        diagnostics.error(sig.ident.span(), message);
        return None;
    };
    match element_of_vec(bare(&taken.ty)) {
        Some(element) => Some((element.clone(), true)),
        None => Some((taken.ty.clone(), false)),
    }
}

fn check_one_transaction(parameters: &[Parameter], diagnostics: &mut Diagnostics) {
    let transactions = parameters.iter().filter(|parameter| matches!(parameter.role, Role::Transaction(_)));
    for second in transactions.skip(1) {
        let message = "an `#[idempotent]` handler has one transaction: only one parameter can be a `&mut`";
        diagnostics.error_on(&second.ty, message);
    }
}

/// A handler of one event has one job, a batch handler a slice of them.
fn check_jobs_fit(parameters: &[Parameter], diagnostics: &mut Diagnostics) {
    let batch = parameters.iter().any(|parameter| matches!(parameter.role, Role::Events));
    for parameter in parameters {
        match parameter.role {
            Role::Job(_) if batch => {
                let message = "a batch handler takes a job for each event: write `jobs: &[Job]`";
                diagnostics.error_on(&parameter.ty, message);
            }
            Role::Jobs(_) if !batch => {
                let message = "a handler of one event has one job: write `job: &Job`, or take a `Vec` of events";
                diagnostics.error_on(&parameter.ty, message);
            }
            _ => {}
        }
    }
}
